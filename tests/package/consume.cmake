# cmake -D BUILD= -D SOURCE= -D EXAMPLES= -D SCRATCH= -D CXX= -D CC= -D GENERATOR= -P consume.cmake
file(REMOVE_RECURSE ${SCRATCH})

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}: ${status}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${SCRATCH}/installed)
# Moved after the install, so that a path of the build that got into the package would be missed.
file(RENAME ${SCRATCH}/installed ${SCRATCH}/moved)
file(GLOB_RECURSE files ${SCRATCH}/moved/*.cmake ${SCRATCH}/moved/*.h ${SCRATCH}/moved/*.pc)
foreach(file ${files})
  file(READ ${file} text)
  string(FIND "${text}" "${BUILD}" at)
  if(NOT at EQUAL -1)
    message(FATAL_ERROR "${file} names the build folder ${BUILD}")
  endif()
endforeach()

run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${SCRATCH}/build -D CMAKE_BUILD_TYPE=Release
    -D CMAKE_CXX_COMPILER=${CXX} -D CMAKE_C_COMPILER=${CC} -D CMAKE_PREFIX_PATH=${SCRATCH}/moved -D EXAMPLES=${EXAMPLES})
run(${CMAKE_COMMAND} --build ${SCRATCH}/build)
run(${SCRATCH}/build/swiglu)
run(${SCRATCH}/build/no_exceptions)
run(${SCRATCH}/build/linear)
run(${SCRATCH}/moved/bin/qmlp info)

# The same C program without CMake.
file(GLOB_RECURSE pc ${SCRATCH}/moved/*/qmlp_c.pc)
cmake_path(GET pc PARENT_PATH pc_folder)
set(ENV{PKG_CONFIG_PATH} ${pc_folder})
execute_process(COMMAND pkg-config --cflags --libs qmlp_c OUTPUT_VARIABLE flags
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
run(${CC} -std=c11 -Wall -Wextra -Werror -pedantic ${EXAMPLES}/c/linear.c -o ${SCRATCH}/plain ${flags} -lm)
cmake_path(GET pc_folder PARENT_PATH lib_folder)
set(ENV{LD_LIBRARY_PATH} ${lib_folder})
run(${SCRATCH}/plain)
